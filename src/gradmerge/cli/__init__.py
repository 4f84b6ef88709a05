"""The command line: thin. It parses, calls the API, and prints."""

from .app import main, script

__all__ = ["main", "script"]
