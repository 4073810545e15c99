"""The page of docs that holds the inequalities of lessons 08 to 12 against published runs."""
