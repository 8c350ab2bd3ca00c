"""One file per question the paper asks; each holds the paper's numbers beside what is measured here."""
