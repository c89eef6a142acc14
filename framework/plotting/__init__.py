"""Pictures of recorded metrics; only ``drawing.py`` imports matplotlib."""
