"""Programs that make the shipped models, and the figures and tables of the documents; not part of the package."""
