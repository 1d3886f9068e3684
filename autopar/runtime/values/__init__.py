"""Where do the values of parameters and buffers come from, and how do they leave?

``initialise`` (the model's own initialisation, tensor by tensor) on ``tensor_values`` (which makes
one whole tensor at a time) and ``transformers_models``, ``pretrained`` (a folder that Hugging Face
libraries read and write), and ``methods`` (what ``compiled`` has of it).
"""
