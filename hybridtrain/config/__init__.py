"""Files <-> frozen dataclasses: strict decoding, canonical encoding."""
