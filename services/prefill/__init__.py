"""The prefill worker: computes prompts and hands their KV, layer by layer, to a decode worker. It decodes nothing."""
