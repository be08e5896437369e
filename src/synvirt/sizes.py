"""Units of bytes. A module of its own, so that the data path needs nothing of the model's to count with."""

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
