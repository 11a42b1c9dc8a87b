"""What bash, zsh and fish complete the words of a command with: scripts that start no Python."""

__all__ = ["scripts"]
