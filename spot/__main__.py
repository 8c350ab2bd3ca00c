"""`python -m spot` is the `spot` command."""

from spot.cli import main

main()
