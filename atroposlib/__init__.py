"""atroposlib: environments that roll out and score LLM responses, and the queue and datasets behind them."""
