"""A model is loaded, run and timed, and what is typed is parsed: for the command and the bench. Not for the Hub."""
