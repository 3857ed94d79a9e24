"""The entries of the table of options, by what they are about."""
