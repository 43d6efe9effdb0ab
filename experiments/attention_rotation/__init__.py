"""Trained twins of a small Transformer that differ by a rotation inside its attention heads; see `task`."""
