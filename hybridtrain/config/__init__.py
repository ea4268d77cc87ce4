"""Files <-> frozen dataclasses: strict in, canonical out. Schemas live where they are used."""
