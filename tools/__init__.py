"""Programs that make what the package ships and what the documents show; not part of the package."""
