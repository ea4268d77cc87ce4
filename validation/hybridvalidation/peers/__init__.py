"""Trainers of others beside ours, on the same tokens and the same card, in one table.

scenario   scenarios/peers/NAME.toml: what is trained on which card, and a recipe for each row
run        one row: planned on the virtual card, executed small on the CPU, measured on CUDA under the card's cap
figures    the record of a run, and how records become rows
table      rows for readers
command    ``hybridtrain peers``
"""
