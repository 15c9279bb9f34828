"""The one error of the data room."""


class DataError(ValueError):
    """A row, a file or a tokenizer that cannot be used; the message names it and says what was expected."""
