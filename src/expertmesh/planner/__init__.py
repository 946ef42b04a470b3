"""What a mixture of experts costs on a cluster: memory, time, days and price, with error bars. Never imports torch."""
