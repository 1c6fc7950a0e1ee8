-- The bytes of a topic's waiting and held records. They are part of the backlog. The triggers count them.
ALTER TABLE onward_topic ADD COLUMN aside INTEGER NOT NULL DEFAULT 0;

UPDATE onward_topic SET aside = (
    SELECT coalesce(sum(length(a.data)), 0) FROM onward_aside a JOIN onward_partition p ON p.id = a.part
    WHERE p.topic = onward_topic.id AND a.state != 'dead'
);

CREATE TRIGGER onward_aside_added AFTER INSERT ON onward_aside WHEN NEW.state != 'dead' BEGIN
    UPDATE onward_topic SET aside = aside + length(NEW.data)
    WHERE id = (SELECT topic FROM onward_partition WHERE id = NEW.part); END;

CREATE TRIGGER onward_aside_removed AFTER DELETE ON onward_aside WHEN OLD.state != 'dead' BEGIN
    UPDATE onward_topic SET aside = aside - length(OLD.data)
    WHERE id = (SELECT topic FROM onward_partition WHERE id = OLD.part); END;

CREATE TRIGGER onward_aside_changed AFTER UPDATE ON onward_aside BEGIN
    UPDATE onward_topic
    SET aside = aside + (NEW.state != 'dead') * length(NEW.data) - (OLD.state != 'dead') * length(OLD.data)
    WHERE id = (SELECT topic FROM onward_partition WHERE id = NEW.part); END;
