"""`python -m spot` runs the `spot` command."""

from spot.cli import main

main()
