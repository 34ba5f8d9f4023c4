"""One module for each queue: how it is installed, fed and worked, in its own documented way."""
