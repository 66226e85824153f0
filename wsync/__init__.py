"""wsync moves the weights of a model in training into the engines that generate with it."""
