"""The values of Penstock and functions of them, without I/O and without a clock."""
