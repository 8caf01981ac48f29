"""Errors a user can act on: what is wrong, where, and what would be right.

The command line prints the message of any of these as one line and exits with code 2.
"""


class EagleJaxError(Exception):
    """Base class of every error this package raises on purpose for a user's input."""


class ConfigError(EagleJaxError):
    """A configuration value, or a combination of values, cannot be used."""


class CheckpointError(EagleJaxError):
    """A checkpoint is damaged, incomplete, or not what its configuration says."""


class InputError(EagleJaxError):
    """A prompt, a prompt file or a command-line option cannot be used."""


def first_line(error: Exception) -> str:
    """What a library's exception says, short enough for one line of ours."""
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
