-- Delete published rows whose events are older than `keep`, at most `max_rows` of them. Returns how many. The relay does
-- this too, as outbox_keep_s says. pg_cron can call it for a longer time. The caller needs SELECT on the tables of shards
-- and meta, and SELECT and DELETE on the outbox.
CREATE FUNCTION {table}_clean(keep interval DEFAULT '0', max_rows bigint DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    stored text := (SELECT value FROM {table}_meta WHERE name = 'identity');
    place text := concat_ws(
        '/',
        CASE WHEN stored LIKE '-%' THEN '-' ELSE (SELECT system_identifier::text FROM pg_control_system()) END,
        (SELECT oid FROM pg_database WHERE datname = current_database()),
        '{table}'::regclass::oid::bigint
    );
    oldest_kept double precision := extract(epoch FROM clock_timestamp() - keep);
    passed bigint := 0;
    deleted bigint := 0;
    more boolean;
BEGIN
    -- In tables that were restored or copied, the numbers of transactions mean nothing until a relay has corrected them.
    IF stored <> place OR EXISTS (
        SELECT FROM {table}_shard
        WHERE pg_snapshot_xmax(coalesce(until, seen)) > pg_snapshot_xmax(pg_current_snapshot())
    ) THEN
        RAISE WARNING 'nothing is deleted: no relay has used {table} since it was created, restored or copied';
        RETURN 0;
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('onward clean {given}', 0)) THEN
        RETURN 0;  -- a relay is deleting rows
    END IF;
    LOOP
        WITH page AS MATERIALIZED (
            SELECT id, xid, shard, event_time FROM {table} WHERE id > passed ORDER BY id LIMIT max_rows
        ), old AS (
            SELECT id FROM page JOIN {table}_shard USING (shard)
            WHERE event_time < oldest_kept AND (
                pg_visible_in_snapshot(xid, seen) OR coalesce(id <= last AND pg_visible_in_snapshot(xid, until), false)
            ) ORDER BY id LIMIT max_rows - deleted
        ), gone AS (
            DELETE FROM {table} WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id
        )
        SELECT deleted + (SELECT count(*) FROM gone), max(id), count(*) = max_rows AND bool_or(event_time < oldest_kept)
            INTO deleted, passed, more FROM page;
        IF deleted >= max_rows OR more IS NOT TRUE THEN
            RETURN deleted;
        END IF;
    END LOOP;
END
$function$;

DO $block$
BEGIN
    EXECUTE format(
        'ALTER FUNCTION {table}_clean(interval, bigint) SET search_path = %s, pg_temp',
        (SELECT relnamespace::regnamespace FROM pg_class WHERE oid = '{table}'::regclass)
    );
END
$block$;
