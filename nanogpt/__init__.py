"""The base model of the course: a small GPT-2, the text it learns from and the loop that trains it."""
