"""The memory table: one model trained in every way, what a rank should hold and send beside what it does."""
