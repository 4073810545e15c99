"""Lesson 01's activations by their large tensors alone: what has neither h nor v nor s² is left out."""


def activation_bytes(config, batch_size, sequence_length):
    h, layers, scores = config.n_embd, config.n_layer, config.n_head * sequence_length
    attention, mlp, head = 5, 9, 1 + config.vocab_size / h  # in tensors of (b, s, h)
    if config.dropout:
        attention, mlp = 6 + 3 * scores / h, mlp + 1
    parts = {
        "embedding": bool(config.dropout),
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norm": 2 * layers + 1,
        "head": head,
    }
    sizes = {part: round(4 * batch_size * sequence_length * h * size) for part, size in parts.items()}
    return sizes | {"total": sum(sizes.values())}
