"""atroposlib: environments that roll out and score LLM responses, and the queue and datasets behind them."""

__version__ = "0.5.0"
