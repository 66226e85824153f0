"""What is wrong with a command line."""


class ConflictError(ValueError):
    """Options that do not go together, or with the number of ranks. The message names them and says what would fit."""
