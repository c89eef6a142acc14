"""What led to a step: sizes of everything, branches, wider passes."""
