"""hybridtrain: train 1B to 50B models on one consumer card, and know before the run whether it fits."""
