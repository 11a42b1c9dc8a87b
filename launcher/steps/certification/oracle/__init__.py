"""The same training in one plain torch process.

It shares nothing with what it judges but the request and the classes that the request names: models, data
sets and the user's own optimizers.
"""
