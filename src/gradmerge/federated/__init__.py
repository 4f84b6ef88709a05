"""Refinement across organisations over Flower: a server that has the model, and owners who keep their data.

`gradmerge.federated.server_app:app` and `gradmerge.federated.client_app:app` are apps of Flower's, and `gradmerge
federated serve` and `gradmerge federated join` run them. One question through a refinement:

1. `refinement/newton.py` asks an owner, as it does where the data are at hand. On the server the owner is a
   :class:`~.remote_owner.RemoteOwner`, which has :class:`~.remote_owner.Federation` ask all clients at once.
2. :mod:`~.wire` makes a message of it: tensors as bytes with a type and a shape, and a few numbers.
3. The client's :class:`~.answerer.Answerer` puts the weights into its own copy of the model and asks a ``DataOwner``;
   with differential privacy a :class:`~.privacy.PrivateOwner`.
4. :mod:`~.verifying` holds the answer against the server's model before anything is made of it.
"""
