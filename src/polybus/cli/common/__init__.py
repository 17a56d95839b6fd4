"""What verbs share: options, output, exit codes, and calls to the bus of a data folder."""
