"""RabbitMQ as a broker, over AMQP 0.9.1."""
