"""The language-model task: corpus, tokens, batches, model, training, evaluation, checkpoint."""
