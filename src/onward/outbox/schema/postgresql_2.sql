-- Write an event, from a trigger or a program in another language. Returns the id of the event. The caller needs INSERT
-- on the table. `lock` waits for other transactions that have locked this key, for keys that have no row to lock.
CREATE FUNCTION {prefix}_enqueue(
    topic text,
    payload bytea,
    key text DEFAULT NULL,
    type text DEFAULT '',
    headers jsonb DEFAULT NULL,
    lock boolean DEFAULT false
) RETURNS text LANGUAGE plpgsql AS $function$
#variable_conflict use_variable
DECLARE
    at double precision := extract(epoch FROM clock_timestamp());
    -- A random UUID with the time in its first 48 bits, and version 7 instead of 4.
    bits bytea := overlay(uuid_send(gen_random_uuid()) PLACING substring(int8send((at * 1000)::bigint) FROM 3) FROM 1);
    event_id text := encode(set_bit(set_bit(bits, 52, 1), 53, 1), 'hex')::uuid::text;
BEGIN
    IF topic IS NULL OR length(topic) NOT BETWEEN 1 AND 200 OR topic ~ '[^A-Za-z0-9._-]' OR topic IN ('.', '..') THEN
        RAISE EXCEPTION 'topic %: use 1 to 200 of the characters A-Z a-z 0-9 . _ -', quote_nullable(topic)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF length(type) > 200 OR type ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'type %: use at most 200 printable characters', quote_literal(type)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(headers) <> 'object' THEN
        RAISE EXCEPTION 'headers %: use a JSON object of names and texts', headers
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF EXISTS (
        SELECT FROM jsonb_each(headers) AS header (name, value)
        WHERE jsonb_typeof(value) <> 'string' OR name = '' OR name ~ '[[:cntrl:]]'
    ) THEN
        RAISE EXCEPTION 'headers %: each value must be a text, and each name needs printable characters', headers
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF lock THEN
        IF key IS NULL THEN
            RAISE EXCEPTION 'lock needs a key' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        PERFORM pg_advisory_xact_lock(hashtextextended(key, 0));
    END IF;
    INSERT INTO {table} (event_id, topic, event_key, event_type, event_time, headers, payload)
        VALUES (event_id, topic, key, coalesce(type, ''), at, nullif(headers, '{}')::text, payload);
    RETURN event_id;
END
$function$;

-- The same with a payload of JSON, for example to_jsonb(NEW).
CREATE FUNCTION {prefix}_enqueue(
    topic text,
    payload jsonb,
    key text DEFAULT NULL,
    type text DEFAULT '',
    headers jsonb DEFAULT NULL,
    lock boolean DEFAULT false
) RETURNS text LANGUAGE sql AS $function$
    SELECT {prefix}_enqueue($1, convert_to($2::text, 'UTF8'), $3, $4, $5, $6)
$function$;

-- The same with a text as payload.
CREATE FUNCTION {prefix}_enqueue(
    topic text,
    payload text,
    key text DEFAULT NULL,
    type text DEFAULT '',
    headers jsonb DEFAULT NULL,
    lock boolean DEFAULT false
) RETURNS text LANGUAGE sql AS $function$
    SELECT {prefix}_enqueue($1, convert_to($2, 'UTF8'), $3, $4, $5, $6)
$function$;

-- The functions find the tables whatever search_path their caller has.
DO $block$
DECLARE
    home text := (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = '{table}'::regclass);
    kind text;
BEGIN
    FOREACH kind IN ARRAY ARRAY['bytea', 'jsonb', 'text'] LOOP
        EXECUTE format('ALTER FUNCTION {prefix}_enqueue(text, %s, text, text, jsonb, boolean) ', kind)
            || format('SET search_path = %s, pg_temp', home);
    END LOOP;
END
$block$;

UPDATE {table}_meta SET value = '2' WHERE name = 'version';
