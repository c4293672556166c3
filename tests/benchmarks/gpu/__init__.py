"""What must be measured on a GPU; see :mod:`.__main__`."""
