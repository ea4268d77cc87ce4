"""What others measured on CUDA and published, planned here by running their trainers on a virtual card.

source     scenarios/recorded/NAME.toml: figures, recipes, versions, and the protocol, written before predicting
engines    one small file for each trainer: builds it with its own settings and runs it on the card
planned    the record of a run, and how records become rows of recorded, planned and error
"""
