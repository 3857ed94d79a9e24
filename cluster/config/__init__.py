"""Configuration of a server: one table of options, read from flags, environment and a TOML file."""
