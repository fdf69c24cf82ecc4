"""Convert and distribute the weights of huge Mixture-of-Experts models in MXFP4.

Data flows one way: ``source`` reads headers, ``plan`` decides every output byte's
place, ``quantize`` turns pieces into MXFP4, ``writer`` commits files front to back,
``manifest`` records what was made. ``pipeline`` and ``verify`` compose these stages;
``cli`` is the only part that prints.
"""

__version__ = "0.1.0"
