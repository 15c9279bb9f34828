"""The one error of this room: a recipe that cannot be run."""


class RecipeError(ValueError):
    """What was given, what was expected, what to do; one line a problem. Shown without a traceback."""
