"""Images from folders, timm data sets and the built-in scenes."""
