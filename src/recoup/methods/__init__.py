"""Methods as values: each is a frozen dataclass with its own fields, and says how to allocate and to recover."""
