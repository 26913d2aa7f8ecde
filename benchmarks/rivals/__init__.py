"""The recipes of other papers, as experiments on recoup's groups of channels. Each file has one, with its source."""
