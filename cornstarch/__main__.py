"""`python -m cornstarch` is the command `cornstarch`."""

from cornstarch.cli.main import main

main()
