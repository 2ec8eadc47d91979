"""No talk from transformers: what matters is ours to say."""


def quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # that of loading, not of training
