"""Files as a stranger might send them: each loads right, or is refused by an error of ours."""
