"""One TOML file per model family: published checkpoints, how people extend them, and the source of each number."""
