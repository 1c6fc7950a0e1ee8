package onward.bench;

import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** BOOTSTRAP TOPIC GROUP EVENTS CONCURRENCY WAIT_MS: handles every event, says on the last line how that went. */
public final class ParallelConsumer {
  private static final long STUCK_S = 100;
  private static final com.sun.management.OperatingSystemMXBean SYSTEM =
      (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

  public static void main(String[] arguments) throws Exception {
    var witness = new Witness(Integer.parseInt(arguments[3]));
    int concurrency = Integer.parseInt(arguments[4]);
    long waitMs = Long.parseLong(arguments[5]);
    var processor = ParallelStreamProcessor.createEosStreamProcessor(options(arguments[0], arguments[2], concurrency));
    processor.subscribe(List.of(arguments[1]));
    processor.poll(
        context -> {
          byte[] value = context.value();
          witness.started();
          if (waitMs > 0) {
            sleep(waitMs);
          }
          witness.saw(value);
        });
    witness.all.await(STUCK_S, TimeUnit.SECONDS);
    processor.closeDrainFirst(Duration.ofSeconds(30));
    System.out.println(witness.told());
    System.out.flush();
    System.exit(0);
  }

  private static ParallelConsumerOptions<byte[], byte[]> options(String bootstrap, String group, int concurrency) {
    Map<String, Object> settings =
        Map.of(
            "bootstrap.servers", bootstrap,
            "group.id", group,
            "auto.offset.reset", "earliest",
            "enable.auto.commit", "false",
            "max.poll.records", "1000");
    var bytes = new ByteArrayDeserializer();
    return ParallelConsumerOptions.<byte[], byte[]>builder()
        .ordering(ProcessingOrder.KEY)
        .maxConcurrency(concurrency)
        .consumer(new KafkaConsumer<>(settings, bytes, bytes))
        .build();
  }

  private static void sleep(long ms) {
    try {
      Thread.sleep(ms);
    } catch (InterruptedException stopped) {
      Thread.currentThread().interrupt();
    }
  }

  /** Each customer's orders are numbered from 0, and one at a time is handled: bench/witness.py, in Java. */
  private static final class Witness {
    private static final int MOST_CUSTOMERS = 100_000;
    private final int expected;
    private final AtomicLong[] next = new AtomicLong[MOST_CUSTOMERS];
    private final AtomicLong handled = new AtomicLong();
    private final AtomicLong inverted = new AtomicLong();
    private final AtomicLong duplicates = new AtomicLong();
    private final AtomicLong first = new AtomicLong();
    private volatile long last;
    private volatile long cpuAtFirst;
    private volatile long cpuAtLast;
    final CountDownLatch all = new CountDownLatch(1);

    Witness(int expected) {
      this.expected = expected;
      for (int customer = 0; customer < MOST_CUSTOMERS; customer++) {
        next[customer] = new AtomicLong();
      }
    }

    void started() {
      if (first.get() == 0 && first.compareAndSet(0, System.nanoTime())) {
        cpuAtFirst = SYSTEM.getProcessCpuTime();
      }
    }

    /** Reads {"customer":"c-17","number":3,...} without a JSON library, which would only cost it time. */
    void saw(byte[] value) {
      String text = new String(value, StandardCharsets.ISO_8859_1);
      int from = text.indexOf("c-") + 2;
      int customer = Integer.parseInt(text, from, text.indexOf('"', from), 10);
      from = text.indexOf("\"number\":") + 9;
      long number = Long.parseLong(text, from, text.indexOf(',', from), 10);
      long due = next[customer].get();
      if (number < due || !next[customer].compareAndSet(due, number + 1)) {
        duplicates.incrementAndGet();
        return;
      }
      if (number > due) {
        inverted.incrementAndGet();
      }
      if (handled.incrementAndGet() == expected) {
        last = System.nanoTime();
        cpuAtLast = SYSTEM.getProcessCpuTime();
        all.countDown();
      }
    }

    String told() throws Exception {
      String peak =
          Files.readAllLines(Path.of("/proc/self/status")).stream()
              .filter(line -> line.startsWith("VmHWM"))
              .findFirst()
              .orElse("VmHWM: 0 kB")
              .replaceAll("\\D", "");
      return String.format(
          java.util.Locale.ROOT,
          "{\"wall_s\":%.6f,\"cpu_s\":%.6f,\"peak_kb\":%s,\"verdict\":"
              + "{\"expected\":%d,\"handled\":%d,\"inverted\":%d,\"duplicates\":%d}}",
          ((last == 0 ? System.nanoTime() : last) - first.get()) / 1e9,
          (cpuAtLast - cpuAtFirst) / 1e9,
          peak,
          expected,
          handled.get(),
          inverted.get(),
          duplicates.get());
    }
  }
}
