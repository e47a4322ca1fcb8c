"""What Penstock is made of, without I/O and without a clock: values, and functions of values."""
