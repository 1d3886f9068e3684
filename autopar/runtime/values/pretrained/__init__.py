"""How does a model go to and come from a folder that Hugging Face libraries know?

``save`` (all ranks write whole tensors) on ``tensor_file`` (a safetensors file, tensor by tensor),
and ``load`` (each rank reads its part) on ``folder`` (which tensors do the files hold?),
``names`` (whose are they?) and ``stored_tensor`` (a tensor that is read in parts).
"""
