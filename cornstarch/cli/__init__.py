"""The command line, one file per command; torch is imported only by the commands that train."""
