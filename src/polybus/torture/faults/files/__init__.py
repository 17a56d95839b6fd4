"""Files of a stopped bus are damaged."""
